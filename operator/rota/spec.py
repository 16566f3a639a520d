"""A custom resource's body, parsed once; a mistake is a sentence with the field's path."""
