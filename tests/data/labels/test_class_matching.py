"""Class matching between weights and datasets."""

from __future__ import annotations

import pytest

from tessera.data.labels.classes import match_classes, renamed_classes, reordered_classes


@pytest.mark.parametrize(
    ("known", "wanted", "found"),
    [
        (["cat", "dog"], ["cat", "dog"], (0, 1)),
        (["cat", "dog"], ["bird", "dog", "cat"], (-1, 1, 0)),
        (["cat", "traffic light"], ["TrafficLight", " Cat"], (1, 0)),
        (["Cat", "cat"], ["cat"], (1,)),  # what is equal goes first
        (["Cat", "cat"], ["cat", "CAT"], (1, 0)),  # and is out of the others' way
        (["Cat", "cat"], ["CAT"], (-1,)),  # which of the two?
        (["cat"], ["Cat", "CAT"], (-1, -1)),
        (["cat", "cat"], ["cat"], (-1,)),
        (["0", "1"], ["cat", "dog"], (0, 1)),
        (["cat", "dog"], ["0", "1"], (0, 1)),
        (["0", "1", "2"], ["0", "1"], (-1, -1)),
        (["9", "4"], ["4", "9", "7"], (1, 0, -1)),  # but labels of digits may be
        (["card"], ["item"], (0,)),  # --single-cls
        (["item", "box"], ["item"], (0,)),
        (["cat", "dog"], ["item"], (-1,)),
        ([], ["cat"], (-1,)),
    ],
)
def test_classes_match_by_name(known: list[str], wanted: list[str], found: tuple[int, ...]) -> None:
    assert match_classes(known, wanted) == found


def test_reordered_and_renamed_classes_are_named() -> None:
    assert reordered_classes(["cat", "dog"], ["Cat ", "hound"]) == ""
    assert reordered_classes(["cat", "dog"], ["dog", "cat"]) == (
        "'cat' is 0 in the checkpoint and 1 in the data, 'dog' is 1 in the checkpoint and 0 in the data"
    )
    assert reordered_classes([*"abcdef"], [*"bcdefa"]).endswith("and 3 more")
    assert renamed_classes(["cat", "dog"], ["pear", "plum"]).startswith("0 is 'cat' in the checkpoint and 'pear' in")
    assert renamed_classes(["cat", "dog", "cow"], ["Cat", "hound", "cow"]) == "", "one that is spelled otherwise"
    assert renamed_classes(["0", "1"], ["cat", "dog"]) == "", "no names at all"
    assert renamed_classes(["cat", "dog"], ["pear"]) == ""
