{{/* Name of an object of the release. Arguments: root, name. */}}
{{- define "starpod.name" -}}
{{- $name := printf "%s-%s" .root.Release.Name .name -}}
{{- if gt (len $name) 52 -}}
{{- fail (printf "%s is longer than 52 characters: shorten the release's name or the fleet's" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* A fleet, completed by the defaults, as JSON. Arguments: root, name, fleet. */}}
{{- define "starpod.fleet" -}}
{{- $fleet := mergeOverwrite (deepCopy .root.Values.fleet) (.fleet | default dict) -}}
{{- $_ := set $fleet "name" .name -}}
{{- $_ := set $fleet "service" ($fleet.service | default .name) -}}
{{- $_ := set $fleet "tag" ($fleet.tag | default .root.Chart.AppVersion) -}}
{{- $fleet | toJson -}}
{{- end -}}

{{/* Labels that never change, by which pods are selected. Arguments: root, component. */}}
{{- define "starpod.selector" -}}
app.kubernetes.io/name: starpod
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* A pod's labels, without the chart's version: a newer chart must not restart the pods of a fleet that pins its tag.
Arguments: root, component, tag (default: the chart's appVersion). */}}
{{- define "starpod.podLabels" -}}
{{ include "starpod.selector" . }}
app.kubernetes.io/version: {{ .tag | default .root.Chart.AppVersion | quote }}
{{- end -}}

{{/* Labels of objects other than pods. Arguments: root, component, tag (default: the chart's appVersion). */}}
{{- define "starpod.labels" -}}
{{ include "starpod.podLabels" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* The pod's spec that all pods share: user 1000, no API token unless it creates pods. Arguments: root, node (values with
nodeSelector, tolerations, affinity, priorityClassName and perhaps machinePods). */}}
{{- define "starpod.pod" -}}
automountServiceAccountToken: {{ .node.machinePods | default false }}
{{- if .node.machinePods }}
serviceAccountName: {{ include "starpod.name" (dict "root" .root "name" "machines") }}
{{- end }}
enableServiceLinks: false
shareProcessNamespace: true # as process 1, the server would miss an early SIGTERM and would have to reap orphans
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .node.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .node.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .node.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .node.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* The container's spec that all containers share: the image and no capabilities. With processUsers, the server runs as root
with the capabilities to give each environment of class `process` a user of its own, and to end its processes. Arguments: root,
image, tag, processUsers (default: false). */}}
{{- define "starpod.container" -}}
image: {{ printf "%s%s:%s" .root.Values.image.registry .image .tag }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  {{- if .processUsers }}
  runAsNonRoot: false
  runAsUser: 0
  capabilities: {drop: [ALL], add: [SETUID, SETGID, KILL]}
  {{- else }}
  capabilities: {drop: [ALL]}
  {{- end }}
{{- end -}}

{{/* "true" if TLS is on, else empty. */}}
{{- define "starpod.tls" -}}
{{- if ne .Values.tls.mode "none" }}true{{ end -}}
{{- end -}}

{{/* The Secret with the servers' certificate. */}}
{{- define "starpod.serverSecret" -}}
{{- if eq .Values.tls.mode "certManager" -}}
{{- include "starpod.name" (dict "root" . "name" "server-tls") -}}
{{- else -}}
{{- required "tls.mode secret needs tls.serverSecret, a Secret with tls.crt, tls.key and ca.crt" .Values.tls.serverSecret -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the trainer's certificate. */}}
{{- define "starpod.clientSecret" -}}
{{- if eq .Values.tls.mode "certManager" -}}
{{- include "starpod.name" (dict "root" . "name" "client-tls") -}}
{{- else -}}
{{- required "tls.mode secret needs tls.clientSecret, a Secret with tls.crt, tls.key and ca.crt" .Values.tls.clientSecret -}}
{{- end -}}
{{- end -}}

{{/* Names of the services of all fleets, as JSON. */}}
{{- define "starpod.services" -}}
{{- $root := . -}}
{{- $services := list -}}
{{- range $name, $fleet := .Values.fleets -}}
{{- $services = append $services (include "starpod.fleet" (dict "root" $root "name" $name "fleet" $fleet) | fromJson).service -}}
{{- end -}}
{{- $services | uniq | sortAlpha | toJson -}}
{{- end -}}

{{/* Requests and limits, with GPUs if count is not 0. Arguments: resources, name (of the GPU resource), count. */}}
{{- define "starpod.gpus" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .count) 0 -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .name (toString .count))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
