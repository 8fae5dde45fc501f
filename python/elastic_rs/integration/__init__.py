"""How PyTorch's launcher comes to this package: entry points, its agent replaced, ``install()``.

Nothing is imported here: entry points are loaded while torch is half imported.
"""
