"""LATENT caches: latent attention absorbed into them, and grouped-query models embedded in them."""

from paged_oracle.latent.gqa import GqaLatent
from paged_oracle.latent.mla import AbsorbedWeights, absorb, decomposed_attention
from paged_oracle.latent.yarn import yarn_magnitude, yarn_scale

__all__ = [
    "AbsorbedWeights",
    "GqaLatent",
    "absorb",
    "decomposed_attention",
    "yarn_magnitude",
    "yarn_scale",
]
