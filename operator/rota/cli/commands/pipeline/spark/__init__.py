"""The Spark session of a command, and errors of Spark as sentences."""
