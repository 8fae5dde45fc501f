"""What happened to a job, and why: ``elastic-rs status``, ``why`` and ``events``. Does not import torch.

``_events`` reads events. ``_story`` finds out from them what each recovery was about and what it cost (pure).
``_text`` writes that as text, ``_page`` into a page, ``_trace`` into a trace.
``_source`` gets events from a coordinator or from files. ``_commands`` has the
command line. ``docs/events.md`` is for users.
"""
