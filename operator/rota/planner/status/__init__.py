"""Output of a plan for users: the group's status and conditions, Events, and journal records."""
