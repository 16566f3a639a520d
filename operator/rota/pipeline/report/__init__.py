"""HTML report of a recommendation: data, cards, plots. May import `recommend` and what `recommend` may import."""
