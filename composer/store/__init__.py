"""What composer remembers of graphs from one process to the next.

What failed (:mod:`~composer.store.failures`) and which engine was fastest
(:mod:`~composer.store.verdicts`) is kept in the disk cache (:mod:`composer.system.disk`); verdicts
also in :mod:`~composer.store.shared_store`, a folder that several machines share.
"""
