#!/usr/bin/env bash
# Sends N streaming chat completions at once and prints what each of them saw.
#
#   N=8 MAX_TOKENS=32 ./examples/serve/load.sh
#   URL=https://127.0.0.1:8443 ./examples/serve/load.sh -k      (arguments go to curl)
#
#   N           requests                                    8
#   MAX_TOKENS  longest answer, tokens                      64
#   ARRIVE      spread the starts over so many ms           0, all at once
#   URL         the server                                  http://127.0.0.1:8080
#   MODEL       a model id                                  the first of /v1/models
#   PROMPT      what to ask; each request's begins with its own number, so no two share a prefix
#
# ttfb and total are milliseconds by curl's own clock, to the first byte and to the last; tok/s is tokens / (total - ttfb).
# Exit status: 0 if every request ended well, 1 if any failed, 2 if the server could not be asked at all.
set -euo pipefail
export LC_ALL=C  # a decimal point in EPOCHREALTIME and awk, whatever the user's language

N=${N:-8} MAX_TOKENS=${MAX_TOKENS:-64} ARRIVE=${ARRIVE:-0} URL=${URL:-http://127.0.0.1:8080} MODEL=${MODEL:-}
PROMPT=${PROMPT:-Tell a story about a lighthouse keeper and a whale.}
# On HTTP/2 the first byte, as curl counts, is that of the connection's settings.
CURL=(curl --silent --show-error --no-buffer --http1.1 "$@")
POLL_S=0.2

die() { echo "load.sh: $*" >&2; exit 2; }

# Prints $1 as a JSON string.
json_string() {
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"} text=${text//$'\n'/\\n} text=${text//$'\r'/\\r} text=${text//$'\t'/\\t}
    printf '"%s"' "$text"
}

# Prints every value of key $1 in the JSON on stdin, one a line, quotes removed: enough for flat fields we know.
json_values() {
    awk -v key="\"$1\"" '{
        while ((at = index($0, key)) > 0) {
            $0 = substr($0, at + length(key))
            if (match($0, /^[ \t]*:[ \t]*("([^"\\]|\\.)*"|[^,}\] \t]+)/)) {
                value = substr($0, 1, RLENGTH)
                sub(/^[ \t]*:[ \t]*/, "", value); gsub(/^"|"$/, "", value); gsub(/\\"/, "\"", value)
                print value
            }
        }
    }'
}

# Waits $1 seconds inside this shell: unlike `sleep`, nothing is left behind when the shell is ended.
pause() { read -rt "$1" -u "$never" || true; }

# Becomes the curl of request $1, after $2 milliseconds.
request() {
    local content
    printf -v content '%d. %s' "$1" "$PROMPT"
    printf '{"model":%s,"max_tokens":%d,"stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":%s}]}' \
        "$(json_string "$MODEL")" "$MAX_TOKENS" "$(json_string "$content")" >"$dir/$1.request"
    printf -v delay '%d.%03d' $(($2 / 1000)) $(($2 % 1000))
    pause "$delay"
    exec "${CURL[@]}" --header 'content-type: application/json' --data-binary "@$dir/$1.request" \
        --output "$dir/$1.answer" --write-out '%{http_code} %{time_starttransfer} %{time_total}\n' \
        "$URL/v1/chat/completions" >"$dir/$1.times" 2>"$dir/$1.trouble"
}

# Prints why request $1, whose curl exited with $2, has no whole answer; nothing if it has one.
trouble() {
    local status=000 rest
    read -r status rest <"$dir/$1.times" || true
    if (($2 != 0)); then
        echo "$(<"$dir/$1.trouble")"
    elif [[ $status != 200 ]]; then
        echo "$status $(json_values reason <"$dir/$1.answer") $(json_values message <"$dir/$1.answer")"
    elif grep -q '^data: *{"error"' "$dir/$1.answer"; then
        echo "error: $(json_values message <"$dir/$1.answer")"
    elif ! grep -q '^data: *\[DONE\]' "$dir/$1.answer"; then
        echo "cut off: no [DONE]"
    fi
}

# Prints the row of request $1 and notes its tokens; fails if the request did.
row() {
    local why status ttfb=0 total=0 tokens finish
    why=$(trouble "$1" "$2")
    read -r status ttfb total < <(awk '{ printf "%s %.1f %.1f\n", $1, 1000 * $2, 1000 * $3 }' "$dir/$1.times") || true
    if [[ $why ]]; then
        printf '%3d  %8s %9s %8s %8s  %s\n' "$1" "$ttfb" "$total" - - "failed: ${why//  / }"
        return 1
    fi
    tokens=$(json_values completion_tokens <"$dir/$1.answer" | tail -n 1)
    finish=$(json_values finish_reason <"$dir/$1.answer" | grep -v '^null$' | tail -n 1)
    echo "${tokens:-0}" >>"$dir/tokens"
    awk -v i="$1" -v ttfb="$ttfb" -v total="$total" -v n="${tokens:-0}" -v finish="$finish" 'BEGIN {
        span = total - ttfb
        rate = (span > 0) ? sprintf("%.1f", 1000 * n / span) : "-"
        printf "%3d  %8s %9s %8d %8s  %s\n", i, ttfb, total, n, rate, finish
    }'
}

# Notes the engine's inflight, over and over, until it is ended.
watch_health() {
    while :; do
        "${CURL[@]}" --max-time 2 "$URL/health" >>"$dir/health" 2>/dev/null && echo >>"$dir/health" || true
        pause "$POLL_S"
    done
}

end_jobs() {
    local jobs
    jobs=$(jobs -pr)
    [[ -z $jobs ]] || kill $jobs 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$dir"
}

((BASH_VERSINFO[0] >= 5)) || die "needs bash 5 or newer, this is $BASH_VERSION"
for name in N MAX_TOKENS ARRIVE; do
    [[ ${!name} =~ ^[0-9]{1,7}$ ]] || die "$name must be a whole number, not '${!name}'"
done
dir=$(mktemp -d)
exec {never}<> <(:)  # never has anything to read
trap end_jobs EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ -z $MODEL ]]; then
    models=$("${CURL[@]}" --fail --max-time 10 "$URL/v1/models") || die "no list of models from $URL"
    MODEL=$(json_values id <<<"$models" | head -n 1)
    [[ $MODEL ]] || die "$URL serves no model"
fi

printf '%3s  %8s %9s %8s %8s  %s\n' '#' ttfb total tokens tok/s finish
watch_health &
watcher=$!
pids=()
started=$EPOCHREALTIME
for ((i = 1; i <= N; i++)); do
    request "$i" $((ARRIVE ? (RANDOM * 32768 + RANDOM) % ARRIVE : 0)) &
    pids[i]=$!
done
n_failed=0
for ((i = 1; i <= N; i++)); do
    code=0
    wait "${pids[i]}" || code=$?
    row "$i" "$code" || n_failed=$((n_failed + 1))
done
ended=$EPOCHREALTIME
kill "$watcher"

touch "$dir/tokens" "$dir/health"
awk -v wall="$started $ended" '
    { n += $1 }
    END { split(wall, at, " "); s = at[2] - at[1]
          printf "wall %.2f s · %d tokens · %.1f tok/s across all requests\n", s, n, n / s }' "$dir/tokens"
most=$(json_values inflight <"$dir/health" | sort -n | tail -n 1)
slots=$(json_values max_inflight <"$dir/health" | sort -n | tail -n 1)
echo "engine inflight while running: max ${most:-unknown} of ${slots:-unknown}"
((n_failed == 0))
