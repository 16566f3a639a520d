"""What a plan reports: the group's status and conditions, Events, and journal records."""
