"""Tools to test an engine, or this package, against: a plain model of the authority and a cache that tells on aliasing."""

from .driver import Choose, KvDriver
from .history import HistoryCache, history_of
from .reference import ReferenceKvModel, ReferenceRow

__all__ = ["Choose", "HistoryCache", "KvDriver", "ReferenceKvModel", "ReferenceRow", "history_of"]
