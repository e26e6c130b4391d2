# How every supervisor finds the processes of a call. Each command's environment carries SBX_CALL with the call's id.

# Whether a process has the mark in the environment that it was started with, or is in the process group given.
belongs() { # pid mark group
    local entry='' state='' group=''
    while IFS= read -rd '' entry; do
        [[ $entry == SBX_CALL=$2 ]] && return 0
    done <"/proc/$1/environ"
    [[ $3 ]] || return 1
    read -r entry <"/proc/$1/stat" || return 1
    read -r state _ group _ <<<"${entry##*) }"
    [[ $group == "$3" && $state != [ZX] ]]
}

# Kills every process of a call, or with '*' of all calls. Again until none is found, because they may be forking. Where
# there are many, a first process stops all of them before: those that fork without end keep us from looking at them.
# The shell and what it waits for die at once, or it would go on to its next command.
kill_all() { # mark group
    local found=1 round=0 pid all=(/proc/[0-9]*) many=''
    [[ $$ == 1 && ${#all[@]} -gt 16 ]] && many=1 && kill -STOP -1
    ((${2:-0} > 1)) && kill -KILL -- "-$2"
    while ((found && round++ < 100)); do
        found=0
        for pid in /proc/[0-9]*; do
            pid=${pid#/proc/}
            [[ $pid != "$$" ]] && belongs "$pid" "$1" "$2" && kill -KILL "$pid" && found=1
        done
    done
    [[ $many ]] && kill -CONT -1
}
