"""The YAML of :mod:`xds.dialects.istio.local_file`: with tags for string matches, and no key twice."""

from collections.abc import Callable
from typing import Any

import yaml

from xds.dialects.istio.rules import Comparison, Text
from xds.errors import ConfigError
from xds.proto.core_yaml import check_aliases


def load(text: str) -> object:
    """The document as plain values and :class:`~xds.dialects.istio.rules.Text`.

    Raises:
        ConfigError: with line and column.
    """
    try:
        content: object = yaml.load(text, Loader=_Loader)
        check_aliases(content)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:  # a scalar that looks like a date and is none
        raise ConfigError(f"not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError("not valid YAML: nested too deeply") from None
    return content


class _Loader(yaml.SafeLoader):
    """Knows the tags of string matches, and refuses a key that is there twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """See the base class."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _constructor(comparison: Comparison) -> Callable[[Any, Any], Any]:
    def construct(loader: Any, node: Any) -> Any:
        if comparison is Comparison.PRESENCE:
            return Text(comparison)
        if not isinstance(node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, f"!{comparison} needs a string", node.start_mark)
        return Text(comparison, str(node.value))

    return construct


for _comparison in Comparison:
    _Loader.add_constructor(f"!{_comparison}", _constructor(_comparison))
