"""Runs training cases in small worlds of real processes and brings back what they computed.

`cases` says what to run and what comes back, `worlds` keeps the processes, `worker` is what runs in them, `hooks`
change or watch an engine there, `compare` judges two results, `cover` picks combinations.
"""
