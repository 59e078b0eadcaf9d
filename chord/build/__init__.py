"""From tables and templates to cubins and a manifest. Not needed at run time; nothing else of chord imports it.

`builder.build` makes everything, `rebuild.rebuild_and_compare` proves that the manifest's cubins come from the sources.
"""
