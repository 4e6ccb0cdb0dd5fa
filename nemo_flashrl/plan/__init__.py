"""`flashrl plan`: memory and time of a layout, by formula, before a GPU is asked for."""
