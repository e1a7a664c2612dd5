"""The table of data sets, the files of `powernorm-data`, and the folders of the user's cache.

The public functions are in `powernorm_lab.data.fetching`.
"""
