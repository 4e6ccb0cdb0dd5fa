"""Recipes of FP8, by name."""


class Recipe: ...


class DelayedScaling(Recipe): ...


class Float8CurrentScaling(Recipe): ...


class MXFP8BlockScaling(Recipe): ...


class Float8BlockScaling(Recipe): ...


class Format:
    E4M3, HYBRID, E5M2 = "E4M3", "HYBRID", "E5M2"
