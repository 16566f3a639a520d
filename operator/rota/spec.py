"""A custom resource's body, parsed once into GroupSpec and PolicySpec; every mistake is a sentence with the field's path."""
