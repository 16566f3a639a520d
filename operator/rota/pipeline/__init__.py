"""The only package that knows Spark: history becomes rollups, simulations and recommendations.

Packages stand on those before them: common, ingest, history, replay, recommend, report and synthetic.
"""
