"""Warm starts: which command lines can have a fork server, what it executes, and how its children become workers.

Nothing is imported here: what a fork server has imported, its workers have too.
"""
