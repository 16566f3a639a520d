"""Shared by all stages of the pipeline: Spark session, schemas, paths, checks of names. Imports no stage."""
