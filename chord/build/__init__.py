"""From tables and templates to cubins and a manifest. Not needed at run time; nothing else of chord imports it.

`builder.build` makes everything, `check.check` proves that the manifest and its cubins come from the sources.
"""
