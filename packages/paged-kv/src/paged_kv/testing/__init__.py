"""A plain model of the authority, a cache that tells on aliasing, and random walks that compare them."""

from .driver import Choose, KvDriver
from .history import HistoryCache, history_of
from .reference import ReferenceKvModel, ReferenceRow

__all__ = ["Choose", "HistoryCache", "KvDriver", "ReferenceKvModel", "ReferenceRow", "history_of"]
