"""The nouns: Queue, Member, Roster, Assignment; frozen, sorted, without I/O."""
