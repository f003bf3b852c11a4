"""LatentTree: a pruned tree trained by differentiating an argmin (Zantedeschi et al. 2021)."""
