"""What all stages share: the Spark session, the schemas of tables, the paths of their files, and names.

Knows no stage.
"""
