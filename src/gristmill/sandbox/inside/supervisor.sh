# The first process of a sandbox. It reads one-line orders from its stdin and launches commands, kills them and tells how
# they ended; it runs nothing of a command itself. Bash 4.2 or later, builtins only: a fork here is paid by every call.
# The host puts these in front: io state mark bounds most workspace home cwd (see Inside); and processes.sh.
#
#   x ID IN   run $io/ID.sh in the shell and keep its directory and exported variables (IN 1: stdin is $io/ID.in)
#   y ID IN   the same, but keep nothing
#   j ID IN   the same as a background job
#   g ID N    print the first N bytes of the file that $io/ID.sh names
#   p ID      write $io/ID.in into the file that $io/ID.sh names
#   k ID      kill all processes of a call        -> k ID CODE
#   w ID      has it ended? no answer: not yet    -> d ID CODE
#   v ID      wait for its end                    -> d ID CODE
#   q         leave, the host cleans up
#
# Further reports, one line each in $io/reports: r ready · e SENTENCE cannot start · u ID PID launched · f ID ERRNO refused ·
# n ID DIRECTORY had vanished, so this runs in the workspace · b ID all that was left running was ended, to make room ·
# (from enter.sh) d ID CODE · m ID about to end, so ask

exec 1<>"$io/reports" 2>/dev/null # for both ways: opening it must not wait for a host that has gone
set -m # each call is a process group of its own
ulimit -c 0
umask 022
# With a handler, because a signal that pid 1 ignores would be ignored by all commands too.
trap : HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 PIPE ALRM TERM XCPU XFSZ VTALRM SYS
cd /
environment=$io/env pending='' slot=0
pids=()
# Where memory runs out, a command goes before the supervisor does.
printf -v body '%s\n. %q "$@"; set --; eval "$SBX_TEXT"; { sbx_leave "$?"; } &>/dev/null' \
    "{ echo 500 >/proc/\$\$/oom_score_adj; $bounds; } 2>/dev/null" "$io/enter"

# Takes over what the last stateful call left, once it is complete: its directory is written last.
catch_up() {
    local left=''
    [[ $pending ]] || return
    IFS= read -rd '' left <"$pending.cwd"
    [[ $left ]] && cwd=$left environment=$pending pending=''
}

# The limit does not bind this shell, but without room a command could start nothing.
make_room() { # id
    local all=(/proc/[0-9]*) round=0
    ((${#all[@]} > most - most / 4)) && kill -KILL -1 || return
    # The dead count until this shell has taken note of them, which it does between two commands.
    while ((${#all[@]} > 1 && round++ < 1000)); do all=(/proc/[0-9]*); done
    printf 'b %s\n' "$1"
}

launch() { # verb id input
    local save='' input=/dev/null
    [[ $most ]] && make_room "$2"
    catch_up
    if [[ ! -d $cwd || ! -x $cwd ]]; then
        printf 'n %s %s\n' "$2" "${cwd//$'\n'/ }"
        cwd=$workspace
        [[ -d $cwd ]] || mkdir -p -- "$cwd" || cwd=/
    fi
    if [[ $1 == x ]]; then
        slot=$(((slot + 1) % 16)) save=$state/$slot pending=$state/$slot
        : >"$save.cwd" >"$save"
    fi
    [[ $3 == 1 ]] && input=$io/$2.in
    # Opened here, not in the child, so that a job's stdin has its reader before it is announced.
    {
        SBX_CALL=$mark$2 "$BASH" --norc -c "$body" bash "$io" "$2" "$cwd" "$environment" "$save" &
    } <"$input" >"$io/$2.out" 2>&1
    pids[$2]=$!
    [[ $1 == j ]] && printf 'u %s %s\n' "$2" "$!"
}

# Sets `path` to the absolute form of the path that a call names.
resolve() { # id
    catch_up
    IFS= read -rd '' path <"$io/$1.sh"
    case $path in
        '~' | '~/'*) path=$home${path#'~'} ;;
        /*) ;;
        *) path=$cwd/$path ;;
    esac
}

get() { # id bytes
    local path=''
    resolve "$1"
    if [[ -d $path ]]; then refuse "$1" 21
    elif [[ ! -e $path ]]; then refuse "$1" 2
    elif [[ ! -f $path ]]; then refuse "$1" 22
    elif [[ ! -r $path ]]; then refuse "$1" 13
    else
        SBX_CALL=$mark$1 head -c "$2" -- "$path" </dev/null >"$io/$1.out" &
        pids[$1]=$!
    fi
}

put() { # id
    local path='' parent
    resolve "$1"
    parent=${path%/*}
    if [[ -d $path || $path == */ ]]; then refuse "$1" 21
    elif [[ -e $path && ! -f $path ]]; then refuse "$1" 22
    elif [[ -e $path && ! -w $path ]]; then refuse "$1" 13
    elif [[ -d ${parent:-/} ]]; then
        SBX_CALL=$mark$1 cat 2>"$io/$1.out" <"$io/$1.in" >"$path" &
        pids[$1]=$!
    else
        { mkdir -p -- "$parent" && cat <"$io/$1.in" >"$path"; } 2>"$io/$1.out" &
        pids[$1]=$!
    fi
}

refuse() { printf 'f %s %s\n' "$1" "$2"; }

ended() { # id wait
    local pid=${pids[$1]-}
    [[ $pid ]] || return
    [[ $2 ]] || ! kill -0 "$pid" || return
    wait "$pid"
    printf 'd %s %s\n' "$1" "$?"
    unset "pids[$1]"
}

if [[ ! -d $cwd || ! -x $cwd ]]; then
    printf 'e The working directory %s does not exist inside, or cannot be entered.\n' "${cwd//$'\n'/ }"
    exit 1
fi
printf 'r\n'
while IFS=' ' read -r verb id argument; do
    case $verb in
        x | y | j) launch "$verb" "$id" "$argument" ;;
        g) get "$id" "$argument" ;;
        p) put "$id" ;;
        k)
            kill_all "$mark$id" "${pids[$id]-}"
            [[ ${pids[$id]-} ]] && wait "${pids[$id]}"
            printf 'k %s %s\n' "$id" "$?"
            unset "pids[$id]"
            ;;
        w) ended "$id" '' ;;
        v) ended "$id" wait ;;
        q) exit 0 ;;
    esac
done
# The host has gone. As pid 1 leaving is enough; without namespaces all processes must be found.
[[ $mark ]] && kill_all "$mark*" ''
exit 0
