// board.c - QEMU's mps2-an385: start, clock, and the debugger ("semihosting") as a console
//
// For your board: CLOCK_HZ, the interrupts in `vectors`, and, without a debugger,
// board_say to a console of yours and board_exit to a reset.
#include "board.h"
#include <stdarg.h>

#define CLOCK_HZ 25000000u
#define UNUSED 0x5afe5afeu // what the stack is filled with

extern uint32_t stack_start[], data_start[], data_end[], data_load[], bss_end[]; // board.ld
void stack_end(void); // an address too, declared so that it fits into `vectors`
void board_reset(void);
int main(void);
volatile uint32_t board_ms;

static void tick(void)
{
    board_ms++;
}

static void fault(void)
{
    board_say("the processor stopped at a fault\n");
    board_exit(1);
}

__attribute__((section(".vectors"), used)) static void (*const vectors[])(void) = {
    stack_end, board_reset, fault, fault, fault, fault, fault, [15] = tick,
    // UART: received, sent; Ethernet.
    [16 + 0] = board_interrupt, [16 + 1] = board_interrupt, [16 + 13] = board_interrupt};

void board_reset(void)
{
    uint32_t *to = stack_start, *from = data_load;
    while (to < (uint32_t *)__builtin_frame_address(0) - 16)
        *(volatile uint32_t *)to++ = UNUSED;
    for (to = data_start; to < data_end;)
        *to++ = *from++;
    while (to < bss_end)
        *to++ = 0;
    REGISTER(0xe000e014) = CLOCK_HZ / 1000 - 1; // SysTick: reload value
    REGISTER(0xe000e010) = 7;                   // the processor's clock, with interrupt, on
    board_exit(main());
}

void board_debugger(uint32_t call, void *argument)
{
    register uint32_t r0 __asm__("r0") = call;
    register void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
}

void board_exit(int status)
{
    uint32_t reason[2] = {0x20026, (uint32_t)status}; // the application has ended
    for (;;)
        board_debugger(0x20, reason);
}

void board_say(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    for (; *format; format++) {
        char text[12] = "", *p = &text[10];
        *p = *format;
        if (*format == '$') {
            p = va_arg(values, char *);
        } else if (*format == '%') {
            uint32_t number = va_arg(values, uint32_t);
            for (p++; p == &text[11] || number > 0; number /= 10)
                *--p = (char)('0' + number % 10);
        }
        board_debugger(4, p);
    }
    va_end(values);
}

void board_say_memory(void)
{
    uintptr_t lowest = (uintptr_t)stack_start;
    while (REGISTER(lowest) == UNUSED)
        lowest += 4;
    board_say("% bytes of code, % of variables, % of stack\n",
              (uintptr_t)data_load - (uintptr_t)vectors, (uintptr_t)bss_end - (uintptr_t)data_start,
              (uintptr_t)stack_end - lowest);
}
