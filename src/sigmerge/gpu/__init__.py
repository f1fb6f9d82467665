"""What `core` does, on a GPU: the loops as programs in Triton, with the same bits; the linear
algebra of solvers in torch. They know arrays and open files, no paths.

`chunk_passes` is called as the loops are; nothing here is imported before a GPU is asked for, but
`staging`, which says where a result lies in a file.
"""
