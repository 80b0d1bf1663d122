"""Single studies, a script each: `python -m studies.NAME` from a checkout."""
