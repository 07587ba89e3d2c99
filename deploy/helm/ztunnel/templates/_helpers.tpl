{{- define "ztunnel.name" -}}
{{ .Values.resourceName | default "ztunnel" }}
{{- end }}

{{- /* A value as text; Helm reads whole numbers as floating ones. */}}
{{- define "ztunnel.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- /* Labels or annotations, whose values are text whatever they are written as. */}}
{{- define "ztunnel.pairs" -}}
{{- $made := dict }}
{{- range $name, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{- $_ := set $made $name (include "ztunnel.text" $value) }}
{{- end }}
{{- end }}
{{- toYaml $made }}
{{- end }}

{{- define "ztunnel.image" -}}
{{- if contains "/" (.Values.image | toString) -}}
{{ .Values.image }}
{{- else -}}
{{- $variant := .Values.variant | default (.Values.global).variant | toString }}
{{- /* Those of Istio's images, which ours do not have. */}}
{{- $variant := has $variant (list "debug" "distroless") | ternary "" $variant -}}
{{ .Values.hub | default (.Values.global).hub }}/{{ .Values.image }}:{{ include "ztunnel.text" (.Values.tag | default (.Values.global).tag) }}{{ with $variant }}-{{ . }}{{ end }}
{{- end -}}
{{- end }}

{{- define "ztunnel.istiod" -}}
istiod{{ with .Values.revision }}-{{ include "ztunnel.text" . }}{{ end }}.{{ .Values.istioNamespace | default (.Values.global).istioNamespace }}.svc:15012
{{- end }}

{{- /* Labels as Istio's charts have them on every object, then the user's: a list of the root, the app, and more of the user's. */}}
{{- define "ztunnel.labels-of" -}}
{{- $root := index . 0 }}
{{- $chart := printf "%s-%s" $root.Chart.Name ($root.Chart.Version | replace "+" "_") }}
{{- $made := dict "app.kubernetes.io/instance" $root.Release.Name "app.kubernetes.io/managed-by" $root.Release.Service }}
{{- $made = merge $made (dict "app.kubernetes.io/part-of" "istio" "app.kubernetes.io/version" $root.Chart.AppVersion "helm.sh/chart" $chart) }}
{{- $made = merge $made (dict "app.kubernetes.io/name" (index . 1) "istio.io/rev" ($root.Values.revision | default "default")) }}
{{- $made = mergeOverwrite $made ($root.Values.labels | default dict) (index . 2 | default dict) }}
{{- include "ztunnel.pairs" (set $made "app" (index . 1)) }}
{{- end }}

{{- define "ztunnel.labels" -}}
{{ include "ztunnel.labels-of" (list . "ztunnel" dict) }}
{{- end }}

{{- define "ztunnel.netpol-labels" -}}
{{ include "ztunnel.labels-of" (list . "ztunnel-netpol" dict) }}
{{- end }}

{{- define "ztunnel.netpol-in-tunnels" -}}
{{ if and (.Values.netpol).enabled (eq (.Values.netpol).tunnels "allow") }}yes{{ end }}
{{- end }}

{{- define "ztunnel.platform" -}}
{{ .Values.platform | default (.Values.global).platform | default (hasPrefix "openshift" (.Values.profile | toString) | ternary "openshift" "") }}
{{- end }}

{{- define "ztunnel.of-namespace" -}}
{{ if or (eq (upper .Values.resourceScope) "ALL") (eq (upper .Values.resourceScope) "NAMESPACE") }}yes{{ end }}
{{- end }}

{{- define "ztunnel.of-cluster" -}}
{{ if or (eq (upper .Values.resourceScope) "ALL") (eq (upper .Values.resourceScope) "CLUSTER") }}yes{{ end }}
{{- end }}

{{- define "ztunnel.roots" -}}
{{- $name := .Values.trustBundleName | default (.Values.global).trustBundleName -}}
{{- if eq (get (.Values.env | default dict) "ENABLE_CLUSTER_TRUST_BUNDLE_API" | toString) "true" -}}
clusterTrustBundle:
  name: istio.io:istiod-ca:{{ $name | default "root-cert" }}
  path: root-cert.pem
{{- else -}}
configMap:
  name: {{ $name | default "istio-ca-root-cert" }}
{{- end -}}
{{- end }}

{{/* The addons to load, in order: files are those of the ConfigMap. */}}
{{- define "ztunnel.addons" -}}
{{- $named := list }}
{{- range .Values.addons.load }}
{{- $named = append $named (contains ".py" . | ternary (printf "/etc/ztunnel/addons/%s" .) .) }}
{{- end }}
{{- join "," $named }}
{{- end }}

{{/* Their options, a line each: name.key=value. */}}
{{- define "ztunnel.addon-options" -}}
{{- $lines := list }}
{{- range $name, $options := .Values.addons.options }}
{{- range $key, $value := $options }}
{{- $text := include "ztunnel.text" $value }}
{{- if kindIs "slice" $value }}
{{- $items := list }}
{{- range $value }}
{{- $items = append $items (include "ztunnel.text" .) }}
{{- end }}
{{- $text = join "," $items }}
{{- else if kindIs "map" $value }}
{{- $pairs := list }}
{{- range $label, $wanted := $value }}
{{- $pairs = append $pairs (printf "%s=%s" $label (include "ztunnel.text" $wanted)) }}
{{- end }}
{{- $text = join "," $pairs }}
{{- end }}
{{- $lines = append $lines (printf "%s.%s=%s" $name $key $text) }}
{{- end }}
{{- end }}
{{- join "\n" $lines }}
{{- end }}
