"""Routing recorded by others becomes a trace, and a trace becomes files that others read.

==================  ========================================================================================
module              what is decided there
==================  ========================================================================================
``contract``        what a format is: `Format`, what it may ask (`Options`), what it hands over (`Part`)
``detect``          the list of all formats, and which of them a file is
``importing``       phases, label, header: from what a format handed over to a trace
``answers``         what the user said: label, columns, numbers of experts, dense layers
``store``           expert ids and weights on their way, on disk and checked
``visits``          from (token, layer) entries in any order to complete tokens; what is missing (``grid``: how)
``arrays``          ``.npy`` and ``.npz`` without pickle and without surprises of size
``tables``          CSV, Parquet and JSON Lines, some rows at a time
``vllm`` ...        one module for each format
``model_file``      expert sizes that a source records, as a model for experiments
``tabular_export``  CSV and Parquet
``oracle_general``  libCacheSim's ``oracleGeneral``
==================  ========================================================================================

A new format is one module with a `Format`, and its entry in ``detect.FORMATS``; ``docs/guide/importing.md`` shows how.
"""
