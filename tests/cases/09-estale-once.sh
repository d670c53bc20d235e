#!/usr/bin/env bash
# dino#155, CycleGAN#1471: one failed read of a file server ends a training
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
cat >e.c <<'E'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>
#include <fcntl.h>
#include <dirent.h>
static int n; static char last[4096]; static int lfd=-1;
static int hit(const char*p){const char*w=getenv("FAIL_PATH");return w&&p&&strstr(p,w);}
static int mode(const char*m){const char*v=getenv("FAIL_AT");return v&&!strcmp(v,m);}
#define OPEN(name) int name(const char*p,int f,...){va_list a;va_start(a,f);int m=va_arg(a,int);va_end(a);\
 int(*r)(const char*,int,...)=dlsym(RTLD_NEXT,#name); if(mode("open")&&hit(p)&&n++<1){errno=ESTALE;return -1;}\
 int d=r(p,f,m); if(mode("read")&&hit(p))lfd=d; return d;}
OPEN(open)
OPEN(open64)
ssize_t read(int d,void*b,size_t c){ssize_t(*r)(int,void*,size_t)=dlsym(RTLD_NEXT,"read"); if(lfd>=0&&d==lfd&&n++<1){errno=EIO;return -1;} return r(d,b,c);}
DIR*opendir(const char*p){DIR*(*r)(const char*)=dlsym(RTLD_NEXT,"opendir"); if(mode("list")&&hit(p)&&n++<1){errno=ESTALE;return 0;} return r(p);}
E
command -v cc >/dev/null || ok "no compiler here: skipped"
cc -shared -fPIC -o e.so e.c -ldl 2>cc.err || bad "$(head -1 cc.err)"
mk d/train a b; mk d/val a b; res=""
run() { FAIL_AT=$1 FAIL_PATH=$2 LD_PRELOAD=$W/e.so timeout 300 "$PY" "$P/scripts/train_distributed.py" --model-type basic_cnn --epochs 2 --batch-size 4 --image-size 32 --data d --tensorboard false --report false --cache off --progress off --log-dir logs --run-name "r$RANDOM" >out 2>&1; rc=$?; echo "$*: $rc $(last)"; [ $rc = 0 ] || res="$res $*(exit $rc)"; }
run open /train/a/3.png; run read /train/a/3.png; run open /val/a/3.png; run list /train/a
[ -z "$res" ] && ok "tried again"; bad "$res; $(last)"
