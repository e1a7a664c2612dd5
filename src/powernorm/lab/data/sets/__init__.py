"""The data sets of the library: what they are, whose, where from, and how they come to the user.

`powernorm.lab.data.fetching` is the door; this package holds the catalog, the folder of the
user's cache, pip as the way to the package index, and the reading of a wheel.
"""
