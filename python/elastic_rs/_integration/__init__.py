"""Integration with PyTorch's launcher: entry points, the agent that it makes, ``install()``.

Nothing is imported here: entry points are loaded while torch is half imported.
"""
