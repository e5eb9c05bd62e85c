"""The leaves of the model: a formula and the module that holds its weights. They know no checkpoint and no text."""
