"""The Spark session of a command, and the jars that it needs."""
