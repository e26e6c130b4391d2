# Runs a program whose stdin and output are reached by short commands. Arguments: a new directory, the mark of what is not
# output, the program. It is told of pieces of stdin by lines in `in`: the name of a file beside it, or `.` for the end. Its
# output is read from `out`, where there is something at least every 20 seconds, so that no command waits for long.
# Marks: t nothing, a sign of life · e the program has ended. `pid` is the program's.

dir=$1 mark=$2
shift 2
umask 077
mkdir -- "$dir" && mkfifo -- "$dir/in" "$dir/out" "$dir/given" "$dir/printed" || exit 1
set -m
exec </dev/null &>/dev/null 3<>"$dir/in" 4<>"$dir/out"

# With a handler, because a program cannot handle what it was started with as ignored.
endure() { trap : HUP INT QUIT USR1 USR2 PIPE ALRM TERM; }

feed() {
    local line='' piece=''
    endure
    while :; do
        if IFS= read -t 20 -r line <&3; then
            piece+=$line
            if [[ $piece == . ]]; then exec >/dev/null; else cat -- "$dir/$piece" && rm -f -- "$dir/$piece"; fi
            piece=''
        else
            piece+=$line
            printf '\0\1%st\n' "$mark" >&4
        fi
    done
}

{
    endure
    cat <"$dir/printed" >&4 3<&- &
    pump=$!
    feed >"$dir/given" &
    feeder=$!
    "$@" <"$dir/given" >"$dir/printed" 3<&- 4<&- &
    program=$!
    printf '%s\n' "$program" >"$dir/pid"
    while kill -0 "$program"; do wait "$program"; done
    kill -KILL "$feeder"
    # What it has printed goes first, but what others print that hold its output does not matter.
    for ((round = 0; round < 10; round++)); do
        kill -0 "$pump" || break
        sleep 0.1
    done
    printf '\0\1%se\n' "$mark" >&4
} &
for ((round = 0; round < 500; round++)); do
    [[ -s $dir/pid ]] && exit
    sleep 0.01
done
