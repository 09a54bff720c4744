// board.h - what the examples need of a board; board.c and board.ld are the board
#include <stdint.h>

#define REGISTER(address) (*(volatile uint32_t *)(address))
#define NVIC_ENABLE REGISTER(0xe000e100) // a bit for each interrupt

#define LOCK() __asm__ volatile("cpsid i" ::: "memory") // interrupts wait
#define UNLOCK() __asm__ volatile("cpsie i" ::: "memory")
#define SLEEP() __asm__ volatile("wfi" ::: "memory") // until an interrupt comes, or waits

extern volatile uint32_t board_ms; // milliseconds since the start, wraps
void board_interrupt(void);        // the driver has it: one of its interrupts came
void board_debugger(uint32_t call, void *argument);
void board_say(const char *format, ...); // $ stands for a string, % for a uint32_t
void board_say_memory(void);             // what the program takes
void board_exit(int status) __attribute__((noreturn));
