"""The reference: every key of every file that people write, made from the code that reads it."""

from zsim.reference.files import FILES, schema_of
from zsim.reference.keys import FileKey, find_keys, keys_of
from zsim.reference.pages import page_of

__all__ = ["FILES", "FileKey", "find_keys", "keys_of", "page_of", "schema_of"]
