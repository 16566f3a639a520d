{{/* The name of all objects: the release's, with the chart's behind it where it is not in it already. */}}
{{- define "rota.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* By what the operator's pods are known. A selector can never change: so there is no version in it. */}}
{{- define "rota.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* What every object carries. */}}
{{- define "rota.labels" -}}
{{ include "rota.selector" . }}
{{ include "rota.origin" . }}
{{- end -}}

{{- define "rota.origin" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rota
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "rota.testSelector" -}}
{{ include "rota.selector" . | replace "component: operator" "component: test" }}
{{- end -}}

{{- define "rota.serviceAccount" -}}
{{- if not (or .Values.serviceAccount.create .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false: set serviceAccount.name, for all pods share the namespace's default" -}}
{{- end -}}
{{- default (include "rota.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{/* How many bytes a quantity such as 8Gi is. */}}
{{- define "rota.bytes" -}}
{{- $binary := dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- $factors := merge $binary (dict "" 1.0 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15) -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $factors (regexFind "[A-Za-z]*$" .)) -}}
{{- end -}}

{{/* An image as one word, of (dict "image" … "version" …). */}}
{{- define "rota.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .version .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Whether only one pod can mount the journal at a time: "true" or nothing. */}}
{{- define "rota.alone" -}}
{{- $claim := and (eq .Values.journal.kind "volume") .Values.journal.claim.enabled -}}
{{- if and $claim (not (has "ReadWriteMany" .Values.journal.claim.accessModes)) -}}
{{- if gt (int .Values.replicas) 1 -}}
{{- fail "journal.claim.accessModes lacks ReadWriteMany: one pod alone can mount the journal; set replicas to 1" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* What the operator may do where groups are. */}}
{{- define "rota.rules" -}}
- apiGroups: [rota.dev]
  resources: [consumergroups, rebalancepolicies]
  verbs: [get, list, watch]
- apiGroups: [rota.dev]
  resources: [consumergroups/status, rebalancepolicies/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, update]
- apiGroups: [""]
  resources: [secrets]  # get: those that groups name; create, update (neither returns existing data): group keys
  verbs: [{{ if not .Values.rbac.secrets }}get, {{ end }}create, update]
- apiGroups: [""]
  resources: [events]
  verbs: [create, get, patch]  # what is said again is counted
{{- if .Values.rbac.fleets }}
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]  # the Deployment of a group that has no template any more
{{- end }}
{{- end -}}

{{- define "rota.secretsRule" -}}
- apiGroups: [""]
  resources: [secrets]  # those that groups name, one by one: it can list none
  verbs: [get]
{{- end -}}

{{- define "rota.subject" -}}
- kind: ServiceAccount
  name: {{ include "rota.serviceAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}

{{/* Ends with a sentence where the Prometheus operator's kinds are unknown; takes (dict "root" $ "value" "…"). */}}
{{- define "rota.needsPrometheusOperator" -}}
{{- if not (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") -}}
{{- $told := "%s needs the Prometheus operator, and the cluster has no monitoring.coreos.com/v1; install it or switch" -}}
{{- fail (printf (print $told " this off (for helm template: --api-versions monitoring.coreos.com/v1)") .value) -}}
{{- end -}}
{{- end -}}

{{/* What the pipeline's objects carry; its pods are no operators. */}}
{{- define "rota.pipelineLabels" -}}
{{ include "rota.labels" . | replace "component: operator" "component: pipeline" }}
{{- end -}}

{{/* A step of the pipeline without its args; takes (dict "root" $ "image" "…"). */}}
{{- define "rota.pipelineContainer" -}}
image: {{ .image | quote }}
imagePullPolicy: {{ .root.Values.pipeline.image.pullPolicy }}
command: [rota, pipeline]
env:
  - {name: SPARK_LOCAL_DIRS, value: /scratch}
  - {name: HOME, value: /scratch}
  - {name: ROTA_SPARK_CORES, value: {{ .root.Values.pipeline.cores | quote }}}
{{- with .root.Values.pipeline.memory }}
  - {name: ROTA_SPARK_MEMORY, value: {{ . | quote }}}
{{- end }}
{{- with .root.Values.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.pipeline.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - {name: journal, mountPath: /journal, readOnly: true}
  - {name: history, mountPath: /history}
  - {name: scratch, mountPath: /scratch}
  - {name: scratch, mountPath: /tmp, subPath: tmp}
{{- if .root.Values.pipeline.policies }}
  - {name: policies, mountPath: /policies, readOnly: true}
{{- end }}
{{- end -}}

{{- /* Whether users of the cluster read the page: not empty if so. */ -}}
{{- define "rota.pageAuth" -}}
{{- if eq .Values.page.auth "Kubernetes" }}yes{{ end }}
{{- end }}

{{- /* The Secret with the token by which Prometheus reads metrics, and the account that it belongs to. */ -}}
{{- define "rota.metricsToken" -}}
{{- .Values.serviceMonitor.tokenSecret | default (printf "%s-metrics" (include "rota.fullname" .)) }}
{{- end }}

{{- /* Whether the page has a certificate of a Secret: not empty if so. */ -}}
{{- define "rota.pageTls" -}}
{{- if and .Values.page.tlsSecret (ne .Values.page.auth "Kubernetes") }}
{{- fail "page.tlsSecret is for page.auth Kubernetes; set both or none of them" }}
{{- end }}
{{- if .Values.page.tlsSecret }}yes{{ end }}
{{- end }}
