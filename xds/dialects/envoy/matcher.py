"""Compiles ``xds.type.matcher.v3.Matcher`` to :mod:`xds.model.matcher`."""

from sys import intern

from xds.dialects.envoy.parts import Parts, key_of
from xds.dialects.envoy.reading import (
    Renamed,
    Shared,
    at,
    constraint,
    network,
    only,
    required,
    string_match,
    unpack,
    unpack_as,
)
from xds.errors import ConfigError, Unsupported
from xds.model import matcher as model
from xds.proto.envoy.extensions.matching.common_inputs.network.v3 import network_pb2 as inputs
from xds.proto.well_known import StringValue
from xds.proto.xds.core.v3 import core_pb2 as xds_core
from xds.proto.xds.type.matcher.v3 import matcher_pb2 as proto

#: Maps with at most this many entries, such as a service's ports, are looked up in the cache by their bytes. A
#: guess.
_FEW = 64


def compile_matcher(message: proto.Matcher, parts: Parts) -> model.Matcher:
    """Compile a matcher whose actions are names of filter chains.

    Args:
        message: the matcher.
        parts: compiled parts to reuse. Newly compiled parts are added to it.

    Raises:
        ConfigError: no lookup, an empty map, or an unknown input or action.
    """
    kind = message.WhichOneof("matcher_type")
    lookup: model.Lookup
    if kind == "matcher_tree":
        with at("matcher_tree"):
            lookup = _tree(message.matcher_tree, parts)
    elif kind == "matcher_list":
        with at("matcher_list"):
            lookup = _list(message.matcher_list, parts)
    else:
        raise constraint(message, "matcher_type", "value is required")
    on_no_match = None
    if message.HasField("on_no_match"):
        with at("on_no_match"):
            on_no_match = _on_match(message.on_no_match, parts)
    return model.Matcher(lookup, on_no_match)


def _on_match(message: proto.Matcher.OnMatch, parts: Parts) -> model.OnMatch:
    kind = message.WhichOneof("on_match")
    name = ""
    if kind == "matcher":
        entries = message.matcher.matcher_tree.exact_match_map.map
        # Only small maps are looked up in the cache by their bytes. Higher levels contain the whole tree, so their
        # bytes are long and differ after each change.
        if len(entries) > _FEW:
            with at("matcher"):
                return model.OnMatch(compile_matcher(message.matcher, parts), message.keep_matching)
        if len(entries) == 1:
            name = entries[next(iter(entries))].action.name
    elif kind != "action":
        raise constraint(message, "on_match", "value is required")
    packed = message.SerializeToString(deterministic=True)
    key = key_of(packed)
    found = parts.on_match(key)
    if found is None:
        found = _renamed_or_compiled(message, parts, packed, name)
        parts.keep_on_match(key, found)
    return found


_named: Renamed[tuple[model.OnMatch, str]] = Renamed()


def _renamed_or_compiled(message: proto.Matcher.OnMatch, parts: Parts, packed: bytes, name: str) -> model.OnMatch:
    """Compile an entry, or reuse a similar one. Entries of services with one port differ only in the filter
    chain's name.

    Args:
        message: the entry.
        parts: compiled parts to reuse.
        packed: the entry's deterministic encoding.
        name: the name of its only action, else "".
    """
    key = _named.key(packed, name)
    kept = None if key is None else _named.get(key)
    if kept is not None:
        return _renamed(*kept, intern(name))
    found = _compiled(message, parts)
    target = found.target
    if key is not None and isinstance(target, model.Matcher) and isinstance(target.lookup, model.ExactMap):
        ((text, _),) = target.lookup.entries.items()
        if _renamed(found, text, name) == found:
            _named.keep_named(key, name, 2, (found, text))  # the action's name and its value
    return found


def _renamed(found: model.OnMatch, text: str, name: str) -> model.OnMatch:
    """Return a copy of an entry that leads to the filter chain ``name``. The entry's map has the single key
    ``text``.
    """
    target = found.target
    assert isinstance(target, model.Matcher)
    assert isinstance(target.lookup, model.ExactMap)
    entries = {text: model.OnMatch(name, target.lookup.entries[text].keep_matching)}
    lookup = model.ExactMap(target.lookup.input, entries)
    return model.OnMatch(model.Matcher(lookup, target.on_no_match), found.keep_matching)


def _compiled(message: proto.Matcher.OnMatch, parts: Parts) -> model.OnMatch:
    if message.HasField("matcher"):
        with at("matcher"):
            return model.OnMatch(compile_matcher(message.matcher, parts), message.keep_matching)
    with at("action", "typed_config"):
        action = unpack_as(message.action.typed_config, StringValue, message.action.name)
    return model.OnMatch(intern(action.value), message.keep_matching)


def _tree(
    message: proto.Matcher.MatcherTree, parts: Parts
) -> model.ExactMap | model.PrefixMap | model.IpTree | model.ServerNameTree:
    with at("input"):
        source = _input(message.input)
    kind = message.WhichOneof("tree_type")
    if kind == "exact_match_map":
        with at("exact_match_map"):
            return model.ExactMap(source, _map(message.exact_match_map, parts))
    if kind == "prefix_match_map":
        with at("prefix_match_map"):
            return model.PrefixMap(source, _map(message.prefix_match_map, parts))
    if kind == "custom_match":
        with at("custom_match", "typed_config"):
            return _custom(source, message.custom_match, parts)
    raise constraint(message, "tree_type", "value is required")


def _map(message: proto.Matcher.MatcherTree.MatchMap, parts: Parts) -> dict[str, model.OnMatch]:
    if not message.map:
        raise constraint(message, "map", "value must contain at least 1 pair(s)")
    entries = {}
    # Each entry is first compared with the previous one, because pods share one action. A comparison takes 0.3 us,
    # but serialising and looking up an entry takes 3 us.
    previous: proto.Matcher.OnMatch | None = None
    for key, value in message.map.items():
        if previous is None or value != previous:
            try:
                found = _on_match(value, parts)
            except ConfigError as error:
                raise error.under(f"map[{key!r}]") from error.__cause__
            previous = value
        entries[key] = found
    return entries


def _custom(
    source: model.Input, config: xds_core.TypedExtensionConfig, parts: Parts
) -> model.IpTree | model.ServerNameTree:
    message = unpack(config.typed_config, config.name)
    if isinstance(message, proto.IPMatcher):
        return model.IpTree(source, _ranges(message, parts))
    if isinstance(message, proto.ServerNameMatcher):
        return model.ServerNameTree(source, _domains(message, parts))
    raise Unsupported(f"no such custom matcher: {message.DESCRIPTOR.full_name}")


def _ranges(message: proto.IPMatcher, parts: Parts) -> tuple[model.IpRange, ...]:
    ranges = []
    for index, entry in enumerate(message.range_matchers):
        with at("range_matchers", index):
            if not entry.ranges:
                raise constraint(entry, "ranges", "value must contain at least 1 item(s)")
            with at("on_match"):
                on_match = _on_match(entry.on_match, parts)
            for position, cidr in enumerate(entry.ranges):
                with at("ranges", position):
                    ranges.append(model.IpRange(network(cidr), on_match, entry.exclusive))
    if not ranges:
        raise constraint(message, "range_matchers", "value must contain at least 1 item(s)")
    return tuple(sorted(ranges, key=lambda entry: -entry.network.prefixlen))


def _domains(message: proto.ServerNameMatcher, parts: Parts) -> dict[str, model.OnMatch]:
    entries: dict[str, model.OnMatch] = {}
    for index, entry in enumerate(message.domain_matchers):
        with at("domain_matchers", index):
            with at("on_match"):
                on_match = _on_match(entry.on_match, parts)
            for domain in entry.domains:
                if "*" in domain.removeprefix("*.") and domain != "*":
                    raise ConfigError(f"'{domain}' is not a name, '*' or '*.' and a name", "domains")
                if domain.lower() in entries:
                    raise ConfigError(f"duplicate domain '{domain}'", "domains")
                entries[domain.lower()] = on_match
    if not entries:
        raise constraint(message, "domain_matchers", "value must contain at least 1 item(s)")
    return entries


def _list(message: proto.Matcher.MatcherList, parts: Parts) -> model.MatcherList:
    if not message.matchers:
        raise constraint(message, "matchers", "value must contain at least 1 item(s)")
    matchers = []
    for index, entry in enumerate(message.matchers):
        with at("matchers", index):
            with at("predicate"):
                predicate = _predicate(entry.predicate)
            with at("on_match"):
                matchers.append((predicate, _on_match(entry.on_match, parts)))
    return model.MatcherList(tuple(matchers))


def _predicate(message: proto.Matcher.MatcherList.Predicate) -> model.Predicate:
    kind = message.WhichOneof("match_type")
    if kind == "single_predicate":
        single = message.single_predicate
        with at("single_predicate"):
            only(single, "input", "value_match")
            if not single.HasField("value_match"):
                raise constraint(single, "matcher", "value is required")
            with at("input"):
                source = _input(single.input)
            with at("value_match"):
                return model.Single(source, string_match(single.value_match))
    if kind == "not_matcher":
        with at("not_matcher"):
            return model.NotPredicate(_predicate(message.not_matcher))
    if kind in ("and_matcher", "or_matcher"):
        inner = message.and_matcher if kind == "and_matcher" else message.or_matcher
        if len(inner.predicate) < 2:
            raise constraint(inner, "predicate", "value must contain at least 2 item(s)")
        predicates = []
        for index, predicate in enumerate(inner.predicate):
            with at(kind, "predicate", index):
                predicates.append(_predicate(predicate))
        if kind == "and_matcher":
            return model.AllPredicates(tuple(predicates))
        return model.AnyPredicate(tuple(predicates))
    raise constraint(message, "match_type", "value is required")


_inputs: Shared[model.Input] = Shared()


def _input(config: xds_core.TypedExtensionConfig) -> model.Input:
    packed = config.SerializeToString(deterministic=True)
    found = _inputs.get(packed)
    if found is None:
        found = _compiled_input(config)
        _inputs.keep(packed, found)
    return found


def _compiled_input(config: xds_core.TypedExtensionConfig) -> model.Input:
    with at("typed_config"):
        message = unpack(config.typed_config, config.name)
        name = message.DESCRIPTOR.name
        if message.DESCRIPTOR.file.package != inputs.DESCRIPTOR.package:
            raise Unsupported(f"no such matching input: {message.DESCRIPTOR.full_name}")
        kind = model.InputKind(name)
        if isinstance(message, inputs.FilterStateInput):
            required(message, "key")
            return model.Input(kind, message.key)
        if isinstance(message, inputs.DynamicMetadataInput):
            return model.Input(kind, message.filter, tuple(segment.key for segment in message.path))
        if kind is model.InputKind.NETWORK_NAMESPACE:
            raise Unsupported("listeners in other network namespaces are not supported")
        return model.Input(kind)
