"""Warm starts: which command lines can have a template, what it executes, and how its children become workers.

Nothing is imported here: what a template has imported, its workers have too.
"""
