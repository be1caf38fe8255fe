#!/usr/bin/env bash
# Asks one question of a conversation that the server keeps, and prints the events of the answer as they come.
#
#   ./examples/infer.sh "What is the capital of France?" 100
#
#   URL              the server                                http://127.0.0.1:8080
#   MODEL            a model id                                the first of /v1/models
#   CONVERSATION_ID  a UUID: give it again to go on with that  a new one
#
# Needs curl. Exit status: 0 if the answer is complete, 1 if not.
set -euo pipefail

if (($# < 1 || $# > 2)); then
    echo "usage: $0 PROMPT [MAX_TOKENS]" >&2
    exit 1
fi
URL=${URL:-http://127.0.0.1:8080} MAX_TOKENS=${2:-64}
CONVERSATION_ID=${CONVERSATION_ID:-$(cat /proc/sys/kernel/random/uuid 2>/dev/null || uuidgen)}
CURL=(curl --silent --show-error --no-buffer)

# Prints $1 as a JSON string.
json_string() {
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"} text=${text//$'\n'/\\n} text=${text//$'\r'/\\r} text=${text//$'\t'/\\t}
    printf '"%s"' "$text"
}

if [[ -z ${MODEL:-} ]]; then
    models=$("${CURL[@]}" --fail "$URL/v1/models")
    MODEL=$(sed -n 's/^[^[]*\[{"id":"\([^"]*\)".*/\1/p' <<<"$models")
fi
body=$(printf '{"conversation_id":"%s","prompt":%s,"model":%s,"max_tokens":%s}' \
    "$CONVERSATION_ID" "$(json_string "$1")" "$(json_string "$MODEL")" "$MAX_TOKENS")

is_complete=1
while IFS= read -r line || [[ -n $line ]]; do
    [[ -n $line ]] && echo "$line"
    [[ $line == data:*'"finish_reason":'* ]] && is_complete=0
done < <("${CURL[@]}" "$URL/coordinator/infer" --header 'content-type: application/json' --data-binary "$body")
exit $is_complete
