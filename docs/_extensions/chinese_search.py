"""Search of a site in English with pages in Chinese, which has no spaces between words.

Runs of Chinese characters are indexed by their pairs, as Lucene's CJKBigramFilter does, and a query is divided in the
same way: 学习率 is 学习 and 习率. So any part of a word is found, without a dictionary. English words are stemmed as
before.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx
from sphinx.search import SearchEnglish

_RUNS = re.compile(r"[\u3400-\u9fff]+|[^\u3400-\u9fff]+")
_CHINESE = re.compile(r"[\u3400-\u9fff]")


def _terms(run: str) -> list[str]:
    """What is indexed of a run of characters: itself, or characters and pairs if they are Chinese."""
    if not _CHINESE.match(run):
        return [run]
    return [*run, *(run[start : start + 2] for start in range(len(run) - 1))]


class EnglishAndChinese(SearchEnglish):
    """English words, and pairs of Chinese characters."""

    lang = "en-zh"
    language_name = "English"  # of the stemmer in JavaScript, EnglishStemmer
    js_splitter_code = r"""
function splitQuery(query) {
  const words = query.match(/[\p{Letter}\p{Number}_\p{Emoji_Presentation}]+/gu) || [];
  const runs = words.flatMap((word) => word.match(/[\u3400-\u9fff]+|[^\u3400-\u9fff]+/g));
  return runs.flatMap((run) => {
    if (run.length === 1 || !/[\u3400-\u9fff]/.test(run)) return [run];
    return Array.from({ length: run.length - 1 }, (_, start) => run.slice(start, start + 2));
  });
}
"""

    def split(self, input: str) -> list[str]:
        """The terms of a text."""
        return [
            term
            for word in super().split(input)
            for run in _RUNS.findall(word)
            for term in _terms(run)
        ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the language ``en-zh`` for ``html_search_language``."""
    app.add_search_language(EnglishAndChinese)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
