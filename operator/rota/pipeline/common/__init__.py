"""Shared by all stages of the pipeline: Spark session, schemas of tables, paths of files, checks of names.

Imports no stage.
"""
