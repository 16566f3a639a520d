{{/* The name of all objects: the release's name, followed by the chart's unless it contains that. */}}
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

{{/* Selector labels of the operator's pods. They have no version, because a selector cannot be changed. */}}
{{- define "rota.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* Labels of every object. */}}
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
{{- fail "serviceAccount.create is false: set serviceAccount.name: the default account is shared by all pods of the namespace" -}}
{{- end -}}
{{- default (include "rota.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{/* The bytes of a quantity such as 8Gi. */}}
{{- define "rota.bytes" -}}
{{- $binary := dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- $factors := merge $binary (dict "" 1.0 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15) -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $factors (regexFind "[A-Za-z]*$" .)) -}}
{{- end -}}

{{/* The URI of the journal's bucket; empty if the journal is elsewhere. */}}
{{- define "rota.bucket" -}}
{{- if and (eq .Values.journal.kind "bucket") (not .Values.journal.uri) -}}
{{- fail "journal.kind is bucket: set journal.uri, such as s3://BUCKET/PREFIX" -}}
{{- end -}}
{{- if and .Values.journal.uri (ne .Values.journal.kind "bucket") -}}
{{- fail "journal.uri is for journal.kind bucket; set both or neither" -}}
{{- end -}}
{{- .Values.journal.uri -}}
{{- end -}}

{{/* The bytes that the operator may use of its spool. */}}
{{- define "rota.spoolLimit" -}}
{{- $limit := mulf 0.9 (include "rota.bytes" .Values.journal.spool | float64) | floor | int64 -}}
{{- if lt $limit 1048576 -}}
{{- fail "journal.spool is too small; the minimum is 2Mi" -}}
{{- end -}}
{{- $limit -}}
{{- end -}}

{{/* An image reference; takes (dict "image" … "version" …). */}}
{{- define "rota.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .version .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* "true" if only one pod can mount the journal at a time, otherwise empty. */}}
{{- define "rota.alone" -}}
{{- $claim := and (eq .Values.journal.kind "volume") .Values.journal.claim.enabled -}}
{{- if and $claim (not (has "ReadWriteMany" .Values.journal.claim.accessModes)) -}}
{{- if gt (int .Values.replicas) 1 -}}
{{- fail "journal.claim.accessModes lacks ReadWriteMany: only one pod can mount the journal; set replicas to 1" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* The operator's rights in the namespaces of groups. */}}
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
  verbs: [create, get, patch]  # patch: count a repeated Event
{{- if .Values.rbac.fleets }}
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]  # delete: after a group has lost its template
{{- end }}
{{- end -}}

{{- define "rota.secretsRule" -}}
- apiGroups: [""]
  resources: [secrets]  # get by name only: those that groups name
  verbs: [get]
{{- end -}}

{{- define "rota.subject" -}}
- kind: ServiceAccount
  name: {{ include "rota.serviceAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}

{{/* Fails with a sentence if the cluster lacks the Prometheus operator's kinds; takes (dict "root" $ "value" "…"). */}}
{{- define "rota.needsPrometheusOperator" -}}
{{- if not (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") -}}
{{- $sentence := "%s needs the Prometheus operator, and the cluster has no monitoring.coreos.com/v1; install it or switch" -}}
{{- fail (printf (print $sentence " this off (for helm template: --api-versions monitoring.coreos.com/v1)") .value) -}}
{{- end -}}
{{- end -}}

{{/* Labels of the pipeline's objects, which the operator's selector does not match. */}}
{{- define "rota.pipelineLabels" -}}
{{ include "rota.labels" . | replace "component: operator" "component: pipeline" }}
{{- end -}}

{{/* A CronJob's spec without its schedule; takes (dict "root" $ "args" (list …) "readOnly" true), which is about the journal. */}}
{{- define "rota.pipelineJob" -}}
{{- $it := .root.Values.pipeline }}
{{- $journal := .root.Values.journal }}
{{- $volume := eq $journal.kind "volume" }}
{{- $secrets := list }}
{{- if and (not $volume) $journal.secret }}{{ $secrets = append $secrets $journal.secret }}{{ end }}
{{- with $it.secret }}{{ $secrets = append $secrets . | uniq }}{{ end -}}
concurrencyPolicy: Forbid  # a concurrent run would only repeat the same work
successfulJobsHistoryLimit: 1
failedJobsHistoryLimit: 2
jobTemplate:
  spec:
    backoffLimit: 1
    activeDeadlineSeconds: 21600  # a job that hangs would block all later ones
    template:
      metadata:
        labels:
          {{- include "rota.pipelineLabels" .root | nindent 10 }}
      spec:
        restartPolicy: Never
        automountServiceAccountToken: false
        enableServiceLinks: false
        {{- with $it.serviceAccountName }}
        serviceAccountName: {{ . }}
        {{- end }}
        {{- with .root.Values.imagePullSecrets }}
        imagePullSecrets:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- with .root.Values.podSecurityContext }}
        securityContext:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        containers:
          - name: {{ first .args }}
            image: {{ include "rota.image" (dict "image" $it.image "version" .root.Chart.AppVersion) | quote }}
            imagePullPolicy: {{ $it.image.pullPolicy }}
            command: [rota, pipeline]
            args:
              {{- toYaml .args | nindent 14 }}
            env:
              - {name: SPARK_LOCAL_DIRS, value: /scratch}
              - {name: HOME, value: /scratch}
              - {name: ROTA_SPARK_CORES, value: {{ $it.cores | quote }}}
              {{- with $it.memory }}
              - {name: ROTA_SPARK_MEMORY, value: {{ . | quote }}}
              {{- end }}
            {{- with $secrets }}
            envFrom:
              {{- range . }}
              - secretRef: {name: {{ . | quote }}}
              {{- end }}
            {{- end }}
            {{- with .root.Values.securityContext }}
            securityContext:
              {{- toYaml . | nindent 14 }}
            {{- end }}
            {{- with $it.resources }}
            resources:
              {{- toYaml . | nindent 14 }}
            {{- end }}
            volumeMounts:
              {{- if $volume }}
              - {name: journal, mountPath: /journal, readOnly: {{ .readOnly }}}
              {{- end }}
              {{- if $it.claim }}
              - {name: history, mountPath: /history}
              {{- end }}
              - {name: scratch, mountPath: /scratch}
              - {name: scratch, mountPath: /tmp, subPath: tmp}
              {{- if $it.policies }}
              - {name: policies, mountPath: /policies, readOnly: true}
              {{- end }}
              {{- if $it.weights }}
              - {name: weights, mountPath: /weights, readOnly: true}
              {{- end }}
        {{- if and $volume (not (has "ReadWriteMany" $journal.claim.accessModes)) }}
        affinity:  # only the operator's node can mount the journal
          podAffinity:
            requiredDuringSchedulingIgnoredDuringExecution:
              - topologyKey: kubernetes.io/hostname
                labelSelector:
                  matchLabels:
                    {{- include "rota.selector" .root | nindent 20 }}
        {{- end }}
        volumes:
          {{- if $volume }}
          - name: journal
            persistentVolumeClaim:
              claimName: {{ default (printf "%s-journal" (include "rota.fullname" .root)) $journal.claim.existing }}
              readOnly: {{ .readOnly }}
          {{- end }}
          {{- with $it.claim }}
          - name: history
            persistentVolumeClaim: {claimName: {{ . }}}
          {{- end }}
          - name: scratch
            emptyDir: {}
          {{- with $it.policies }}
          - name: policies
            configMap: {name: {{ . }}}
          {{- end }}
          {{- if $it.weights }}
          - name: weights
            configMap: {name: {{ include "rota.fullname" .root | trunc 43 | trimSuffix "-" }}-pipeline-weights}
          {{- end }}
        {{- with .root.Values.nodeSelector }}
        nodeSelector:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- with .root.Values.tolerations }}
        tolerations:
          {{- toYaml . | nindent 10 }}
        {{- end }}
{{- end -}}

{{- /* Not empty if cluster users log in to the page. */ -}}
{{- define "rota.pageAuth" -}}
{{- if eq .Values.page.auth "Kubernetes" }}yes{{ end }}
{{- end }}

{{- /* The name of Prometheus's account and of the Secret with its token. */ -}}
{{- define "rota.metricsToken" -}}
{{- .Values.serviceMonitor.tokenSecret | default (printf "%s-metrics" (include "rota.fullname" .)) }}
{{- end }}

{{- /* Not empty if the page's certificate comes from a Secret. */ -}}
{{- define "rota.pageTls" -}}
{{- if and .Values.page.tlsSecret (ne .Values.page.auth "Kubernetes") }}
{{- fail "page.tlsSecret is for page.auth Kubernetes; set both or neither" }}
{{- end }}
{{- if .Values.page.tlsSecret }}yes{{ end }}
{{- end }}
