"""What composer keeps on disk from one process to the next.

Two forms: :mod:`~composer.system.disk`, shelves of records with blobs, and
:mod:`~composer.store.ledger`, rows of one SQLite file. :mod:`~composer.store.shared_store` is a
folder that several machines share. In them are kept what failed (:mod:`~composer.store.failures`)
and which engine was fastest (:mod:`~composer.store.verdicts`).
"""
