"""Spark pipeline: makes rollups, simulations and recommendations of journals. No other package imports Spark.

A package imports only those before it in this list: common, lake, ingest, history, replay, recommend, report,
synthetic.
"""
