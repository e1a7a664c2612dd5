"""The data sets of the library: what they are, whose, where from, and how they come to the user.

`powernorm_lab.data.fetching` is the door; this package holds the table of data sets, the files of
`powernorm-data`, and the folders of the user's cache.
"""
