"""Public functions under the names of the systems that they come from, with the semantics of those systems."""
