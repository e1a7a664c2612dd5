"""Named entities: readers of the official files, tag schemes, word vectors, batches."""
