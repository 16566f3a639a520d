"""Reading the journal into tables: selects files, validates and deduplicates lines. May import `common`."""
