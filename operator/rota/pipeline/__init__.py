"""The only room that knows Spark: history into rollups, simulations and recommendations."""
